{{- define "persia.name" -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "persia.labels" -}}
app.kubernetes.io/name: persia
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "persia.selector" -}}
app.kubernetes.io/name: persia
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
